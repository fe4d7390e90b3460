"""How a tenant's text becomes token rows: the tokenizer, the template, the tokens that end an answer, the row count.

The provider sees row counts. A party that decides how text becomes rows can therefore make a text readable from its
number of rows: the files of this folder say what a provider's own bundle may decide, and what it may not.
"""
