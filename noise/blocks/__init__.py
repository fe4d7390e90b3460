"""Blocks of mask rows: made ahead of use, handed out once, by threads of their own."""
