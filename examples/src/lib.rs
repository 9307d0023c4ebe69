//! Programs to run and read: the small sandbox that they and the tests act in, a scripted model that plays recorded
//! sessions, an agent that works through them, and the judge of how it ended.

pub mod agent;
pub mod judge;
pub mod model;
pub mod sandbox;
pub mod session;
