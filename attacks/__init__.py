"""This package plays a dishonest provider. It tries to steal the tenant's adapter, prompts and data from what a
provider sees.

If an adversary wins, the mask does not protect against that adversary. If an adversary does not win, this shows only
that its code, on this traffic, did no better than guessing. It is no evidence of security. Security rests on the
assumption that `client.explain()` prints (docs/security-evaluation.md).
"""
