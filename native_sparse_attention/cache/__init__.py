"""KV caches: keys and values of the tokens that an attention layer has processed."""
