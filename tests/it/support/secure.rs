//! TLS before a plain server of a test, with a certificate that only its `ca_file` vouches for.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// A certificate of its own, and the file that vouches for it.
pub(crate) struct Certificate {
    pub(crate) acceptor: TlsAcceptor,
    pub(crate) ca_file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Certificate {
    pub(crate) fn of(name: &str) -> Self {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        let ca_file = folder.path().join("ca.pem");
        std::fs::write(&ca_file, made.cert.pem()).expect("a file");
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a server");
        Self { acceptor: TlsAcceptor::from(Arc::new(config)), ca_file, _folder: folder }
    }
}

/// A server behind TLS, as `localhost`.
pub(crate) struct Secured {
    port: u16,
    certificate: Certificate,
}

impl Secured {
    /// Before the server at `to`.
    pub(crate) async fn before(to: SocketAddr) -> Self {
        let certificate = Certificate::of("localhost");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let acceptor = certificate.acceptor.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut near) = acceptor.accept(tcp).await else { return };
                    let Ok(mut far) = TcpStream::connect(to).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
        Self { port, certificate }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.port)
    }

    /// As a configuration names it.
    pub(crate) fn ca_file(&self) -> String {
        format!("ca_file = {:?}", self.certificate.ca_file)
    }
}
