"""Blocks of mask rows: threads of their own make them ahead of use, and each row is handed out once."""
