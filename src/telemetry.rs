//! Metrics, the log, and the text of errors. All names of metrics are in this module.

mod exposition;
mod labels;
pub mod log;
mod metrics;
pub mod pace;
mod process;
mod procfs;

pub use self::exposition::Exposition;
pub use self::labels::{
    Delivery, Drained, LateAnswer, LookupEnd, Loss, Probe, Reply, Step, Swept, TunnelEnd, Way,
    WentBack, Would,
};
pub use self::metrics::{GaugeGuard, Metrics};
pub use self::process::{task_begun, task_ended};

/// An error and its causes in one line, outermost first, without repetitions.
#[must_use]
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // A transparent error has the same text as its cause.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
