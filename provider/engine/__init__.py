"""From a request in the queue to its reply: what shares a product, who computes it, how it is handed back."""
