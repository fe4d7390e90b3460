"""This package makes blocks of mask rows ahead of use, in threads of its own, and gives each row to one caller only."""
