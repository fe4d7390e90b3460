"""From findings to a table: the catalogue of adversaries, the command line, the verdict of a build."""
