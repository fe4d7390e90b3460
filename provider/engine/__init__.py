"""The way from a request in the queue to its reply: what shares a product, what computes it, how the reply is handed
back."""
