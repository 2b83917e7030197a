"""The public operations and the backends that run them."""
