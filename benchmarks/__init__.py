"""What is measured by hand: nothing here is imported by the harness or the engine."""
