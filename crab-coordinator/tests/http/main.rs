//! The coordinator over real sockets, against a scripted model.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test stops where it is surprised")]

mod support;

mod access_log;
mod added_provider;
mod bad_input;
mod curl;
mod forwarding;
mod gating;
mod http2;
mod journal;
mod protocols;
mod retries;
