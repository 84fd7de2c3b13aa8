"""Where a run is sent: profiles, targets, manifests."""
