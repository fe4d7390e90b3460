"""This package turns a tenant's text into token rows: tokenizer, chat template, stop tokens and row counts.

The provider sees row counts. If the provider also decides how text becomes rows, it can choose rules under which a
number of rows reveals the text. The modules of this package therefore bound what a provider's bundle may decide.
"""
