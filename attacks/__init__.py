"""Plays the provider, and tries to steal the tenant's adapter, prompts and data from what a provider sees.

What a result here means: an adversary that wins shows that a mask hides nothing from it. One that does not win shows
only that this code, on this traffic, did no better than its baseline; it is not evidence of security, which rests on
the assumption that `client.explain()` prints (docs/security-evaluation.md).
"""
