"""Statistics of what models compute for texts, collected layer by layer."""
