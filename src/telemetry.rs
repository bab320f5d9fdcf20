//! Metrics and the log, and how an error is written down. Nobody else names a metric.

mod labels;
pub mod log;
mod metrics;
pub mod pace;
mod process;

pub use self::labels::{
    Delivery, Drained, LateAnswer, LookupEnd, Loss, Probe, Reply, Step, Swept, TunnelEnd, Way,
    WentBack, Would,
};
pub use self::metrics::{GaugeGuard, Metrics};
pub use self::process::task_ended;

/// An error with its causes, outermost first and each once, for one line of a log or of a message.
#[must_use]
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // A transparent error says the same as its cause.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
