"""This package makes blocks of mask rows ahead of use, in threads of its own, and hands out each row once."""
