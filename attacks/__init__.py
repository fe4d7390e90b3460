"""This package plays the provider and tries to steal the tenant's adapter, prompts and data from what a provider sees.

If an adversary wins, the mask hides nothing from it. If it does not win, that shows only that this code, on this
traffic, did no better than its baseline. That is no evidence of security, which rests on the assumption that
`client.explain()` prints (docs/security-evaluation.md).
"""
