//! Which sandbox a request comes from.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crab_core::{Result, SandboxId};
use http::header::HeaderName;
use http::request::Parts;
use http::uri::PathAndQuery;
use parking_lot::RwLock;

/// What is known of the client's side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A TCP peer.
    Ip(IpAddr),
    /// A process on this host, by a unix socket.
    Unix,
}

/// Says which sandbox a request comes from. Called once for each request; must not block.
pub trait SandboxResolver: Send + Sync + 'static {
    /// The sandbox, or `None` where the request names none that is served. The resolver takes out of the request what
    /// was meant for it alone (a path prefix, a header): the rest is forwarded.
    ///
    /// A turn without a sandbox is refused, never forwarded ungated.
    fn resolve(&self, peer: Peer, request: &mut Parts) -> Option<SandboxId>;
}

/// Every request of the listener comes from one sandbox: the listener, a port or a unix socket, names it.
#[derive(Clone, Debug)]
pub struct OneSandbox(pub SandboxId);

impl SandboxResolver for OneSandbox {
    fn resolve(&self, _peer: Peer, _request: &mut Parts) -> Option<SandboxId> {
        Some(self.0.clone())
    }
}

/// The path names the sandbox: `/sandbox/<id>/v1/messages` is `/v1/messages` of that sandbox. Any well-formed name is
/// taken; requests outside of the prefix have no sandbox.
#[derive(Clone, Debug)]
pub struct ByPath {
    prefix: String,
}

impl ByPath {
    /// With a prefix of one or more path segments, such as `/sandbox`.
    #[must_use]
    pub fn new(prefix: &str) -> Self {
        let trimmed = prefix.trim_matches('/');
        Self { prefix: format!("/{trimmed}/").replace("//", "/") }
    }
}

impl Default for ByPath {
    fn default() -> Self {
        Self::new("/sandbox")
    }
}

impl SandboxResolver for ByPath {
    fn resolve(&self, _peer: Peer, request: &mut Parts) -> Option<SandboxId> {
        let path_and_query = request.uri.path_and_query()?.as_str();
        let rest = path_and_query.strip_prefix(self.prefix.as_str())?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let id = SandboxId::new(&rest[..end]).ok()?;
        let rest = &rest[end..];
        let rest = if rest.starts_with('/') {
            PathAndQuery::try_from(rest)
        } else {
            PathAndQuery::try_from(format!("/{rest}"))
        };
        let mut uri = std::mem::take(&mut request.uri).into_parts();
        uri.path_and_query = Some(rest.ok()?);
        request.uri = http::Uri::from_parts(uri).ok()?;
        Some(id)
    }
}

/// A header names the sandbox. It is not forwarded.
#[derive(Clone, Debug)]
pub struct ByHeader(pub HeaderName);

impl Default for ByHeader {
    fn default() -> Self {
        Self(HeaderName::from_static("x-crab-sandbox"))
    }
}

impl SandboxResolver for ByHeader {
    fn resolve(&self, _peer: Peer, request: &mut Parts) -> Option<SandboxId> {
        let value = request.headers.remove(&self.0)?;
        SandboxId::new(value.to_str().ok()?).ok()
    }
}

/// The client's address names the sandbox. The table may be changed while the coordinator runs.
#[derive(Clone, Debug, Default)]
pub struct ByAddress(Arc<RwLock<HashMap<IpAddr, SandboxId>>>);

impl ByAddress {
    /// Names the sandbox behind an address.
    pub fn insert(&self, address: IpAddr, sandbox: SandboxId) {
        self.0.write().insert(address, sandbox);
    }

    /// Forgets an address.
    pub fn remove(&self, address: IpAddr) {
        self.0.write().remove(&address);
    }
}

impl SandboxResolver for ByAddress {
    fn resolve(&self, peer: Peer, _request: &mut Parts) -> Option<SandboxId> {
        match peer {
            Peer::Ip(address) => self.0.read().get(&address).cloned(),
            Peer::Unix => None,
        }
    }
}

/// Takes from another resolver only the sandboxes that are in a list, which may be changed while the coordinator runs.
/// Where requests name their sandbox themselves, this keeps an agent from making up names; it does not keep one agent
/// from naming another's sandbox. Where agents are not trusted with each other, give each a listener of its own.
#[derive(Clone, Debug)]
pub struct Listed<R> {
    inner: R,
    list: Arc<RwLock<HashSet<SandboxId>>>,
}

impl<R: SandboxResolver> Listed<R> {
    /// With an empty list.
    #[must_use]
    pub fn new(inner: R) -> Self {
        Self { inner, list: Arc::default() }
    }

    /// Puts a sandbox on the list.
    pub fn insert(&self, sandbox: SandboxId) {
        self.list.write().insert(sandbox);
    }

    /// Takes a sandbox off the list.
    pub fn remove(&self, sandbox: &SandboxId) {
        self.list.write().remove(sandbox);
    }
}

impl<R: SandboxResolver> SandboxResolver for Listed<R> {
    fn resolve(&self, peer: Peer, request: &mut Parts) -> Option<SandboxId> {
        let sandbox = self.inner.resolve(peer, request)?;
        self.list.read().contains(&sandbox).then_some(sandbox)
    }
}

/// [`OneSandbox`] from a name.
///
/// # Errors
/// [`ErrorKind::InvalidInput`](crab_core::ErrorKind::InvalidInput) where the name is not one.
pub fn one_sandbox(name: &str) -> Result<OneSandbox> {
    Ok(OneSandbox(SandboxId::new(name)?))
}

impl fmt::Debug for dyn SandboxResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sandbox resolver")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uri: &str) -> Parts {
        http::Request::get(uri).body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_path_prefix_is_taken_off_and_the_query_stays() {
        let by_path = ByPath::default();
        for (uri, id, rest) in [
            ("/sandbox/a/v1/messages?beta=true", "a", "/v1/messages?beta=true"),
            ("/sandbox/a.b-1", "a.b-1", "/"),
            ("/sandbox/a?x=/y", "a", "/?x=/y"),
            ("/sandbox/a/?x", "a", "/?x"),
            ("http://host:1/sandbox/a/v1", "a", "http://host:1/v1"),
        ] {
            let mut parts = request(uri);
            let found = by_path.resolve(Peer::Unix, &mut parts).unwrap();
            assert_eq!(found.as_str(), id);
            assert_eq!(parts.uri.to_string(), rest);
        }
        for uri in ["/", "/sandbox", "/sandbox/", "/sandbox/../v1", "/sandbox/%61/v1", "/sandboxes/a/v1"] {
            assert!(by_path.resolve(Peer::Unix, &mut request(uri)).is_none(), "{uri}");
        }
    }

    #[test]
    fn only_listed_sandboxes_are_served() {
        let listed = Listed::new(ByPath::default());
        let resolve = || listed.resolve(Peer::Unix, &mut request("/sandbox/a/v1"));
        assert_eq!(resolve(), None);
        let a = SandboxId::new("a").unwrap();
        listed.clone().insert(a.clone());
        assert_eq!(resolve(), Some(a.clone()));
        listed.remove(&a);
        assert_eq!(resolve(), None);
    }

    #[test]
    fn a_header_is_taken_out() {
        let mut parts = request("/");
        parts.headers.insert("x-crab-sandbox", "box".parse().unwrap());
        let found = ByHeader::default().resolve(Peer::Unix, &mut parts);
        assert_eq!(found.unwrap().as_str(), "box");
        assert!(parts.headers.is_empty());
    }
}
