"""The pure core of the scheduler: what runs in the next step, and what its result means."""
