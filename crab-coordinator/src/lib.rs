//! The reverse proxy between agent and model that finds turn boundaries and holds the gate.
//!
//! An agent is pointed at the coordinator in the model's place. The coordinator forwards every request at once. Where
//! the request ends a turn ([`provider`] says which do), it gives a [`Boundary`](crab_core::Boundary) out and holds the
//! model's answer until the boundary's gate opens; then the answer streams through as it comes. All else passes through.
//!
//! ```no_run
//! use crab_coordinator::{Coordinator, Listen, resolve::ByPath};
//! use crab_core::{TurnBoundary, Verdict, VersionId};
//!
//! # async fn run() -> crab_core::Result<()> {
//! let (coordinator, mut boundaries) = Coordinator::builder()
//!     .upstream("http://127.0.0.1:9000")
//!     .listen(Listen::loopback(), ByPath::default())
//!     .journal("/var/lib/crab/journal")
//!     .start()
//!     .await?;
//! println!("agents use http://{}/sandbox/NAME", coordinator.address().unwrap());
//! while let Some(boundary) = boundaries.next().await {
//!     println!("{} {}", boundary.turn.sandbox, boundary.turn.number);
//!     // An engine does this when the turn's version is durable.
//!     boundary.gate.decide(Verdict::Durable(VersionId(1)));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # What holds
//! - **Nothing leaks through a closed gate.** Of the model's answer nothing goes out before the verdict; only where an
//!   event stream is held for long its status and headers, with signs of life in the provider's form.
//! - **A request is sent once.** The coordinator never repeats one; a client's own repetition is recognized (see
//!   [`repeats`]) and does not reach the model where the answer is here or coming.
//! - **Memory is bounded.** Bodies stream both ways; what is kept of each is bounded by [`Builder::answer_window`] and
//!   [`Builder::request_buffer`].
//! - **Answers are durable before their end is given**, and a part of one is never taken for a whole.
//!
//! - **No one waits for ever.** Silence, slow heads, answers that never begin and gates that nobody decides end in an
//!   error; see the timeouts of [`Builder`].
//!
//! # Who is trusted
//! The coordinator does not authenticate. Whoever reaches a listener acts for the sandboxes that its resolver names, so
//! agents that are not trusted with each other need listeners of their own ([`resolve::OneSandbox`]). An agent that can
//! reach its model by another way is not held by any gate: the sandbox's network must leave it only this one.
//!
//! # Speed
//! Most of what a turn costs here is the passing of small things between tasks. Where microseconds count, give the
//! coordinator a current-thread runtime of its own, on a thread of its own, and build it with `lto = "fat"` and
//! `codegen-units = 1`. Sandboxes may be spread over several such coordinators, each with its own journal.
//!
//! # Limits
//! - HTTP/1.1, and HTTP/2 with prior knowledge, towards agents. Towards models either by TLS, as the server chooses;
//!   in the plain HTTP/1.1, or HTTP/2 with prior knowledge where the upstream is given as `h2c://host:port`.
//! - Informational responses other than `100 Continue` and `101` end here: the server side of hyper has no way to send
//!   them. No model's API uses them.
//! - A trailer goes on to an HTTP/1.1 client only where the answer's `Trailer` header names it and the request said
//!   `TE: trailers`.
//! - A client that closes its sending half is taken for gone, as most proxies do: its request is cancelled.
//! - A compressed event stream, a stream of JSON lines and an answer in one piece cannot be kept alive while they are
//!   held, since nothing can be put into them.
//! - Requests whose signature covers the host name (SigV4) are refused by their model's server; see
//!   [`provider::Bedrock`].

mod admin;
mod body;
mod coordinator;
pub mod digest;
mod event;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod headers;
mod intake;
mod journal;
mod line;
mod linger;
pub mod names;
mod patience;
pub mod provider;
pub mod resolve;
mod respond;
mod server;
mod service;
pub mod sse;
mod tls;
mod turn;
mod upstream;

pub use coordinator::{AfterRestore, Boundaries, Builder, Coordinator, GateRecord, TurnRecord};
pub use event::{Event, Events};
pub use journal::JournalLimits;
pub use server::Listen;
pub use turn::gate::GatePolicy;

#[doc = include_str!("repeats.md")]
pub mod repeats {}
