//! TLS to Postgres with `sslmode=prefer`: any certificate will do, also one of X.509 version 1, whose server holds its key.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oncegate::store::postgres::Postgres;
use oncegate::telemetry::causes;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, SupportedProtocolVersion, version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::postgres::{settings, sql};
use crate::support::postgres::{Cluster, own_folder, server_user};

/// Certificates of version 1 that signed themselves, and their keys.
const RSA: (&str, &str) = ("v1-rsa.crt", "rsa.pem");
const EC: (&str, &str) = ("v1-ec.crt", "v1-ec.pem");

fn key_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/keys").join(name)
}

/// A copy as the server wants it: its own, and nobody else's.
fn for_the_server(folder: &Path, name: &str) -> String {
    let copy = folder.join(name);
    std::fs::copy(key_file(name), &copy).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o600)).unwrap();
    if let Some((uid, gid)) = server_user() {
        std::os::unix::fs::chown(&copy, Some(uid), Some(gid)).unwrap();
    }
    copy.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_version_1_is_as_good_as_any() {
    let folder = own_folder("tls");
    for (certificate, key) in [RSA, EC] {
        for protocol in ["TLSv1.2", "TLSv1.3"] {
            let settings = [
                "ssl=on".to_owned(),
                format!("ssl_cert_file={}", for_the_server(&folder, certificate)),
                format!("ssl_key_file={}", for_the_server(&folder, key)),
                format!("ssl_min_protocol_version={protocol}"),
                format!("ssl_max_protocol_version={protocol}"),
            ];
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let cluster = tokio::task::block_in_place(|| Cluster::with(&settings));
            speaks_tls(&cluster.database(), protocol).await;
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Opens a store there, and sees in the server how it is connected.
async fn speaks_tls(url: &str, protocol: &str) {
    let opened = Postgres::open(settings(&format!("{url}?sslmode=prefer"))).await;
    let store = opened.unwrap_or_else(|error| panic!("{protocol}: {}", causes(&error)));
    tokio::spawn(async move { store.migrate(true).await }).await.unwrap().unwrap();
    let opened = Postgres::open(settings(&format!("{url}?sslmode=prefer"))).await.unwrap();
    let asking = tokio::spawn(async move {
        oncegate::store::Operators::ping(&opened).await.unwrap();
        opened
    });
    let _open = asking.await.unwrap();
    let spoken = "SELECT min(s.version) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid)
                  WHERE a.application_name = 'oncegate' AND s.ssl";
    let row = sql(url).await.query_one(spoken, &[]).await.unwrap();
    assert_eq!(row.get::<_, Option<String>>(0).as_deref(), Some(protocol));
}

/// Shows a certificate, and signs with a key of its own.
#[derive(Debug)]
struct Pretender(Arc<CertifiedKey>);

impl ResolvesServerCert for Pretender {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// What becomes of a connection to a server that shows this certificate and signs with this key.
async fn meets(
    certificate: &str,
    key: &PrivateKeyDer<'static>,
    version: &'static SupportedProtocolVersion,
) -> String {
    let chain = vec![CertificateDer::from_pem_file(key_file(certificate)).unwrap()];
    let signing = ring::default_provider().key_provider.load_private_key(key.clone_key()).unwrap();
    let shown = Pretender(Arc::new(CertifiedKey::new(chain, signing)));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(shown));
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut asked = [0; 8];
        socket.read_exact(&mut asked).await.unwrap();
        socket.write_all(b"S").await.unwrap();
        // What comes after the handshake is not played.
        acceptor.accept(socket).await.is_ok()
    });
    let url = format!("postgres://postgres@127.0.0.1:{port}/none?sslmode=prefer");
    let error = Postgres::open(settings(&url)).await.map(drop).unwrap_err();
    let accepted = serving.await.unwrap();
    format!("handshake: {accepted}: {}", causes(&error))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_hold_the_key_of_its_certificate_is_refused() {
    let other = rcgen::KeyPair::generate().unwrap();
    let other = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(other.serialize_der()));
    let own = |name| PrivateKeyDer::from_pem_file(key_file(name)).unwrap();
    for version in [&version::TLS12, &version::TLS13] {
        for (certificate, key) in [RSA, EC] {
            let told = meets(certificate, &own(key), version).await;
            assert!(!told.contains("invalid peer certificate"), "{certificate}: {told}");
        }
        let told = meets(EC.0, &other, version).await;
        assert!(told.contains("invalid peer certificate: BadSignature"), "{told}");
        let told = meets(RSA.0, &other, version).await;
        assert!(told.contains("invalid peer certificate"), "{told}");
    }
}
