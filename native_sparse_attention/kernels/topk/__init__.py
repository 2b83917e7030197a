"""Which blocks a query selects, and the gates of differentiable top-k."""
