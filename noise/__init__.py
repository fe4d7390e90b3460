"""This package holds the masks. Each mask decides what is sent in place of activations and gradients, and how the
replies are unmasked. Of this project's packages it imports only wire and runtime."""
