//! Programs to run and read, and the small sandbox that they and the tests act in.

pub mod sandbox;
