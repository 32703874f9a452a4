"""How ranks notice that one of them failed, agree on which and where, and stop waiting for it; see `watch`."""
