"""The accelerator: which device computes, what lies on it, and how rows get there and back."""
