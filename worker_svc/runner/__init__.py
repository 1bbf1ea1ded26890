"""Plan fold, batch state, forward pass and sampling of one rank."""
