"""Does one segment of a plan: read, compute in float32 on a device, write at offsets. Decides nothing."""
