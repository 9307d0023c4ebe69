//! Programs to run and read: the small sandbox that they and the tests act in, a scripted model that plays recorded
//! sessions, an agent that works through them, Crab as a process of its own beside them, crashes on purpose, and the
//! judge of how it ended.

pub mod agent;
pub mod crash;
pub mod crowd;
pub mod import;
pub mod interrupt;
pub mod judge;
pub mod model;
pub mod percentile;
pub mod run;
pub mod sandbox;
pub mod service;
pub mod session;
pub mod stand_in;
pub mod volatile;
