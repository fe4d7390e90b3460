"""This package implements the kinds of PEFT adapters that need products with base weights.

PEFT's own layers of these kinds read the base weight, which stays with the provider. The layers here compute the same
outputs from products, which the provider makes from masked rows. Some kinds start from a part of the base weight; this
part is found by rows that are public and go without a mask (docs/peft.md)."""
