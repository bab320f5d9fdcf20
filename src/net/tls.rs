//! TLS for outgoing connections: trusted certificates and the configuration of the client.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, ServerName};
use rustls::{ClientConfig, ConfigBuilder, Error, RootCertStore, WantsVerifier};
use tokio_rustls::TlsConnector;

/// TLS to the server of this name.
pub type Tls = (TlsConnector, ServerName<'static>);

/// The base of the configuration of a TLS client.
///
/// # Errors
/// None is known to happen.
pub fn client() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()
}

/// The same with trusted certificates.
///
/// # Errors
/// As [`client`].
pub fn trusting(
    roots: RootCertStore,
) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, String> {
    client().map(|config| config.with_root_certificates(roots)).map_err(|error| error.to_string())
}

/// TLS to `host`: a name, or an address in brackets or not.
///
/// # Errors
/// It is neither.
pub fn to(host: &str, config: ClientConfig) -> Result<Tls, InvalidDnsNameError> {
    let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
    Ok((TlsConnector::from(Arc::new(config)), name))
}

/// The trusted certificates: those of a PEM file, or the system's if no file is named. A system may have none.
///
/// # Errors
/// The file's name, and what is wrong: it cannot be read, or holds no certificate, or one that cannot be used.
pub fn roots(ca_file: Option<&Path>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca_file else {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "a root certificate of the system cannot be read");
        }
        // A few broken certificates of the system are normal. The others are still used.
        roots.add_parsable_certificates(found.certs);
        return Ok(roots);
    };
    let wrong = |error: &dyn Display| format!("{}: {error}", path.display());
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))? {
        let certificate = certificate.map_err(|error| wrong(&error))?;
        roots.add(certificate).map_err(|error| wrong(&error))?;
    }
    if roots.is_empty() {
        return Err(wrong(&"there is no certificate in it (PEM)"));
    }
    Ok(roots)
}
