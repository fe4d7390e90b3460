"""How a tenant's text becomes token rows: which tokenizer, which template, which tokens end an answer, how many rows.

Row counts are visible to the provider. So whoever decides how text becomes rows can make a text readable from its
number of rows: the files of this folder say what a provider's own bundle may decide, and what it may not.
"""
