"""What is computed: the public operations and the backends that run them."""
