//! What deliveries are signed with, and how it is replaced while they go on.
//!
//! A file of secrets is read again every few seconds, by whoever delivers then, and what stands in it from then on signs:
//! old, then new and old, then new, without a restart. What must stay true: at every moment there is at least one secret. A
//! file that cannot be read, or in which a line is wrong, changes nothing and is told; no secret stands in what is told.

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

/// The secrets of a text: one a line, blank lines and `#` comments left out.
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

/// The secrets of one sink as they stand now.
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
    /// What was last told to be wrong with the file.
    told: Option<String>,
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
            told: None,
        };
        Ok(Self { sink: sink.to_owned(), file, every, now: Mutex::new(now) })
    }

    /// Those that sign now, after another look at the file if the last one is long ago. By the deadline at the latest.
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

    /// One of those who ask at the same time looks, the others go on with what is there.
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
            Ok((_, secrets)) if secrets == now.secrets => now.told = None,
            Ok((signers, secrets)) => {
                let count = secrets.len();
                (now.signers, now.secrets, now.told) = (signers, secrets, None);
                drop(now);
                tracing::info!(sink, %file, count, "deliveries are signed with the new secrets");
            }
            Err(why) if now.told.as_ref() == Some(&why) => {}
            Err(why) => {
                now.told = Some(why.clone());
                drop(now);
                tracing::error!(sink, %file, why, "the new secrets cannot be used: the old ones go on signing");
            }
        }
    }
}
