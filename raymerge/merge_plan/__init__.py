"""The merge as data: tables, expressions, segments, memory, checks. Pure; imports no planner."""
