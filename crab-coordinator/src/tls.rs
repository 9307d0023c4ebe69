//! Whom the coordinator trusts when it calls the model's server.

use std::sync::Arc;

use crab_core::{Error, ErrorKind, Result};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

/// The system's certificates and these, given in PEM.
pub(crate) fn config(extra_roots: &[Vec<u8>]) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let found = system_roots();
    let (_, unusable) = roots.add_parsable_certificates(found);
    if unusable > 0 {
        tracing::debug!(unusable, "some of the system's certificates cannot be used");
    }
    for pem in extra_roots {
        let refuse = |why: String| {
            Error::new(ErrorKind::InvalidInput, format!("an extra root certificate cannot be used: {why}"))
                .fix("give certificates in PEM")
        };
        let mut any = false;
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| refuse(error.to_string()))?;
            roots.add(certificate).map_err(|error| refuse(error.to_string()))?;
            any = true;
        }
        if !any {
            return Err(refuse("it holds no certificate".into()));
        }
    }
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(ErrorKind::Internal, "TLS cannot be set up").caused_by(error))
        .map(|builder| builder.with_root_certificates(roots).with_no_client_auth())
}

fn system_roots() -> Vec<CertificateDer<'static>> {
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        tracing::debug!(%error, "some of the system's certificates cannot be read");
    }
    found.certs
}
