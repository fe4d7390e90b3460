"""This package implements the kinds of PEFT adapters that need products with base weights, one kind per file.

PEFT's own layers of these kinds read the base weight, which stays with the provider. The layers here compute the same
from products, which the provider makes from masked rows (docs/peft.md)."""
