"""This package holds the masks, one file each. Every mask implements `MaskScheme` of noise/scheme.py."""
