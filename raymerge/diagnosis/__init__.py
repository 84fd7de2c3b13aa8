"""What would hinder a merge: this machine, a place for models, a cluster. Nothing here changes anything."""
