"""A small, real inference engine: paged K/V, continuous batching, preemption by recompute."""
