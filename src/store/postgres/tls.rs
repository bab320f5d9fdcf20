//! TLS to the database, by the URL's `sslmode`.
//!
//! `verify-full` takes a certificate that one of the roots has signed and that names the host; `verify-ca` looks at the roots
//! only; `require` is `verify-full`, which is more than libpq does. `prefer`, the default, takes TLS where the server offers it
//! and falls back to plain text where it does not: it protects against listeners only, so it takes any certificate, as other
//! clients of Postgres do. `disable` speaks plain text.
//!
//! Any certificate includes those that rustls' verifier does not read, of X.509 version 1 for example, as `openssl x509` makes
//! them from a request without extensions. Only the key is needed of it: the server must sign the handshake with that.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;
use x509_cert::Certificate;
use x509_cert::der::{Decode as _, Encode as _};
use x509_cert::spki::SubjectPublicKeyInfoOwned;

use super::access::{Roots, Tls};
use crate::net::tls;
use crate::store::Cause;

/// How TLS is spoken in this mode.
pub(super) fn connector(tls: &Tls) -> Result<MakeRustlsConnect, Cause> {
    let config = tls::client()?;
    let provider = Arc::clone(config.crypto_provider());
    let config = match tls {
        Tls::Prefer => config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth(),
        Tls::VerifyCa(roots) => {
            let roots = Arc::new(trusted(roots)?);
            let inner = WebPkiServerVerifier::builder_with_provider(roots, provider).build()?;
            config
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AnyName(inner)))
                .with_no_client_auth()
        }
        Tls::VerifyFull(roots) => {
            config.with_root_certificates(trusted(roots)?).with_no_client_auth()
        }
        Tls::Disable => config.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
    };
    Ok(MakeRustlsConnect::new(config))
}

/// The certificates that may sign the server's.
fn trusted(roots: &Roots) -> Result<RootCertStore, String> {
    let file = match roots {
        Roots::System => None,
        Roots::File(path) => Some(path.as_path()),
    };
    tls::roots(file).map_err(|why| format!("the roots in {why}"))
}

/// Takes a certificate of one of the roots, whichever host it names.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The name is looked at last, after the chain.
        match self.0.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Takes any certificate, and still demands that the server holds its key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
            .or_else(|_| signed_by_the_key(message, &key_of(certificate)?, signed, algorithms))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms).or_else(|_| {
            let key = key_of(certificate)?.to_der().map_err(unreadable)?;
            let key = SubjectPublicKeyInfoDer::from(key);
            verify_tls13_signature_with_raw_key(message, &key, signed, algorithms)
        })
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The key of a certificate, of whichever version.
fn key_of(certificate: &CertificateDer<'_>) -> Result<SubjectPublicKeyInfoOwned, Error> {
    let certificate = Certificate::from_der(certificate).map_err(unreadable)?;
    Ok(certificate.tbs_certificate.subject_public_key_info)
}

fn unreadable(_: x509_cert::der::Error) -> Error {
    CertificateError::BadEncoding.into()
}

/// Whether a handshake of TLS 1.2 is signed by this key. A scheme stands for several algorithms there: the key says which.
fn signed_by_the_key(
    message: &[u8],
    key: &SubjectPublicKeyInfoOwned,
    signed: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<HandshakeSignatureValid, Error> {
    let identifier = key.algorithm.to_der().map_err(unreadable)?;
    // Without its tag and length, as the algorithms name it: it is never longer than one byte of length says.
    let identifier = identifier.get(2..).unwrap_or_default();
    let bits = key.subject_public_key.as_bytes().unwrap_or_default();
    let of_scheme = algorithms.mapping.iter().find(|(scheme, _)| *scheme == signed.scheme);
    let mut candidates = of_scheme.into_iter().flat_map(|(_, candidates)| candidates.iter());
    let valid = candidates.any(|algorithm| {
        algorithm.public_key_alg_id().as_ref() == identifier
            && algorithm.verify_signature(bits, message, signed.signature()).is_ok()
    });
    if valid {
        Ok(HandshakeSignatureValid::assertion())
    } else {
        Err(CertificateError::BadSignature.into())
    }
}
