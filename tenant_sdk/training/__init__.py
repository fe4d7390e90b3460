"""This package fine-tunes: it reads the data set, makes token rows, runs transformers' Trainer and keeps
checkpoints."""
