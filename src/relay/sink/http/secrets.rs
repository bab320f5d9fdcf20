//! The secrets that sign deliveries, and their rotation.
//!
//! A delivery reads the file of secrets again every few seconds. All secrets in the file sign, so that a rotation (old,
//! then new and old, then new) needs no restart. Invariants: there is always at least one secret. A file that cannot be
//! read, or that has a wrong line, changes nothing and is logged. The log holds no secret.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use ring::hmac;
use tokio::time::{Instant, timeout_at};

/// Sizes of a secret's key that Standard Webhooks allows, in bytes.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

const PREFIX: &str = "whsec_";

/// The secrets of a text: one on each line, without blank lines and `#` comments.
#[must_use]
pub fn lines(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// All secrets sign.
pub(super) type Signers = Arc<[hmac::Key]>;

pub(super) fn signers(secrets: &[String]) -> Result<Signers, String> {
    if secrets.is_empty() {
        return Err("there is no secret to sign with".into());
    }
    let signer = |(line, secret): (usize, &String)| {
        let key = secret.strip_prefix(PREFIX).and_then(|text| STANDARD.decode(text).ok());
        let key = key.filter(|key| BYTES.contains(&key.len()));
        key.map(|key| hmac::Key::new(hmac::HMAC_SHA256, &key)).ok_or_else(|| {
            format!(
                "secret {} is not {PREFIX} followed by the base64 of {} to {} bytes",
                line + 1,
                BYTES.start(),
                BYTES.end()
            )
        })
    };
    secrets.iter().enumerate().map(signer).collect()
}

/// The present secrets of one sink.
pub(super) struct Secrets {
    sink: String,
    file: Option<PathBuf>,
    every: Duration,
    now: Mutex<Now>,
}

struct Now {
    secrets: Vec<String>,
    signers: Signers,
    looked: Instant,
    /// The error of the file that was logged last.
    logged: Option<String>,
}

impl Secrets {
    pub(super) fn new(
        sink: &str,
        secrets: &[String],
        file: Option<PathBuf>,
        every: Duration,
    ) -> Result<Self, String> {
        let now = Now {
            secrets: secrets.to_vec(),
            signers: signers(secrets)?,
            looked: Instant::now(),
            logged: None,
        };
        Ok(Self { sink: sink.to_owned(), file, every, now: Mutex::new(now) })
    }

    /// The secrets that sign now. Reads the file first if the last reading is long ago, at most until the deadline.
    pub(super) async fn signers(&self, deadline: Instant) -> Signers {
        if let Some(file) = self.file.as_deref().filter(|_| self.look_is_due()) {
            let found = timeout_at(deadline, tokio::fs::read_to_string(file)).await;
            let found = match found {
                Ok(Ok(text)) => Ok(lines(&text)),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("it takes too long to read".to_owned()),
            };
            self.take(file, found);
        }
        Arc::clone(&self.now.lock().signers)
    }

    /// Only one of several concurrent deliveries reads the file. The others use the secrets that are there.
    fn look_is_due(&self) -> bool {
        let mut now = self.now.lock();
        let due = now.looked.elapsed() >= self.every;
        if due {
            now.looked = Instant::now();
        }
        due
    }

    fn take(&self, file: &Path, found: Result<Vec<String>, String>) {
        let made = found.and_then(|secrets| Ok((signers(&secrets)?, secrets)));
        let (sink, file) = (&self.sink, file.display());
        let mut now = self.now.lock();
        match made {
            Ok((_, secrets)) if secrets == now.secrets => now.logged = None,
            Ok((signers, secrets)) => {
                let count = secrets.len();
                (now.signers, now.secrets, now.logged) = (signers, secrets, None);
                drop(now);
                tracing::info!(sink, %file, count, "deliveries are signed with the new secrets");
            }
            Err(why) if now.logged.as_ref() == Some(&why) => {}
            Err(why) => {
                now.logged = Some(why.clone());
                drop(now);
                tracing::error!(sink, %file, why, "the new secrets cannot be used: the old ones go on signing");
            }
        }
    }
}
