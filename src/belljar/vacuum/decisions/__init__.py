"""Which machines to start now: shares, back-off, sizes. Functions of values, the same in the factory and in `bench/vacuum_policies`."""
