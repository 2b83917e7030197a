"""KV caches: what a layer keeps of the tokens it has seen."""
