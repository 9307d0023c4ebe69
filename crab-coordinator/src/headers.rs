//! Which headers belong to one connection only (RFC 9110, section 7.6.1) and are not forwarded.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Removes what concerns this connection only: the fixed set, and whatever `Connection` names. `TE: trailers` stays,
/// since trailers are forwarded.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none of them, and looking is cheaper than removing.
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return;
    }
    let wants_trailers = headers.get_all(header::TE).iter().any(|value| lists(value, "trailers"));
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        // A client must not be able to make us drop what frames or routes the message.
        .filter(|name| !matches!(*name, header::CONTENT_LENGTH | header::HOST))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Whether this request asks for another protocol, and which. An offer of another version of HTTP, or of TLS, is not
/// taken: the client goes on without, and inside of it turns would pass unseen.
pub(crate) fn upgrade_wanted(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers.get_all(header::CONNECTION).iter().any(|value| lists(value, "upgrade"));
    let wanted = headers.get(header::UPGRADE).filter(|_| asks)?;
    let is_http = |name: &str| {
        let name = name.trim().to_ascii_lowercase();
        name.starts_with("h2c") || name.starts_with("http/") || name.starts_with("tls/")
    };
    let carried = wanted.to_str().is_ok_and(|names| !names.split(',').any(is_http));
    carried.then(|| wanted.clone())
}

/// Whether a comma-separated value holds this token.
pub(crate) fn lists(value: &HeaderValue, token: &str) -> bool {
    value.to_str().is_ok_and(|text| {
        text.split(',').any(|part| {
            let part = part.split(';').next().unwrap_or(part);
            part.trim().eq_ignore_ascii_case(token)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn what_connection_names_goes_and_the_rest_stays() {
        let mut headers = map(&[
            ("connection", "close, X-Mine , content-length"),
            ("x-mine", "1"),
            ("x-other", "2"),
            ("te", "deflate;q=0.5, trailers"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("trailer", "x-sum"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(
            headers,
            map(&[("x-other", "2"), ("content-length", "3"), ("trailer", "x-sum"), ("te", "trailers"),])
        );
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        assert!(upgrade_wanted(&map(&[("upgrade", "websocket")])).is_none());
        assert!(upgrade_wanted(&map(&[("connection", "Upgrade")])).is_none());
        let both = map(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert_eq!(upgrade_wanted(&both).unwrap(), "websocket");
        for http in ["h2c", "websocket, h2c", "HTTP/2.0", "TLS/1.2"] {
            assert!(upgrade_wanted(&map(&[("connection", "upgrade"), ("upgrade", http)])).is_none(), "{http}");
        }
    }
}
