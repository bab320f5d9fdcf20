//! What Linux says of this process, under the names that every exporter has for it (`process_...`). Read at each scrape; what
//! cannot be read is left out.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// Shows it on one more page.
pub(super) fn register(registry: &mut Registry) {
    registry.register_collector(Box::new(Procfs { booted: booted() }));
}

#[derive(Debug)]
struct Procfs {
    /// When the system began, in seconds of the epoch.
    booted: Option<f64>,
}

impl Collector for Procfs {
    fn encode(&self, mut page: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut show =
            |name: &str, help: &str, metric: &dyn Shown| metric.show(&mut page, name, help);
        let stat = std::fs::read_to_string("/proc/self/stat").ok();
        if let Some(stat) = stat.as_deref().and_then(Stat::of) {
            let cpu = ConstCounter::new(seconds(stat.cpu_ticks));
            show("process_cpu_seconds", "User and system time of the processor", &cpu)?;
            let threads = ConstGauge::new(stat.threads);
            show("process_threads", "Threads of the process", &threads)?;
            let size = ConstGauge::new(stat.virtual_bytes);
            show("process_virtual_memory_bytes", "Size of the virtual memory", &size)?;
            let resident = ConstGauge::new(stat.resident_pages.saturating_mul(page_bytes()));
            show(
                "process_resident_memory_bytes",
                "Size of the memory that is resident",
                &resident,
            )?;
            if let Some(booted) = self.booted {
                let started = ConstGauge::new(booted + seconds(stat.started_ticks));
                let help = "When the process started, in seconds of the epoch";
                show("process_start_time_seconds", help, &started)?;
            }
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            // One of them is this very look.
            let open = u64::try_from(open.count()).unwrap_or(u64::MAX).saturating_sub(1);
            show("process_open_fds", "Open file descriptors", &ConstGauge::new(open))?;
        }
        // None: no limit.
        if let Some(most) = getrlimit(Resource::Nofile).current {
            let help = "How many file descriptors may be open";
            show("process_max_fds", help, &ConstGauge::new(most))?;
        }
        Ok(())
    }
}

/// A metric with its value.
trait Shown {
    fn show(&self, page: &mut DescriptorEncoder<'_>, name: &str, help: &str) -> fmt::Result;
}

impl<M: EncodeMetric> Shown for M {
    fn show(&self, page: &mut DescriptorEncoder<'_>, name: &str, help: &str) -> fmt::Result {
        self.encode(page.encode_descriptor(name, help, None, self.metric_type())?)
    }
}

/// What `/proc/self/stat` says (proc_pid_stat(5)).
#[derive(Debug, PartialEq)]
struct Stat {
    cpu_ticks: u64,
    threads: u64,
    started_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    fn of(line: &str) -> Option<Self> {
        // The second field is the program's name in brackets, and may hold blanks and brackets of its own.
        let (_, fields) = line.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        // By their numbers in the manual, where the first one behind the name is 3.
        let field = |number: usize| fields.get(number.checked_sub(3)?)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)?.saturating_add(field(15)?),
            threads: field(20)?,
            started_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "seconds, exact to a tick for ages")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / clock_ticks_per_second() as f64
}

fn page_bytes() -> u64 {
    u64::try_from(page_size()).unwrap_or(u64::MAX)
}

fn booted() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_those_of_the_manual_whatever_the_program_is_called() {
        let line = "1 (a) b (c) S 2 3 4 5 6 7 8 9 10 11 100 20 12 13 14 15 33 16 4000 500000 77 18446744073709551615 1\n";
        let wanted = Stat {
            cpu_ticks: 120,
            threads: 33,
            started_ticks: 4000,
            virtual_bytes: 500_000,
            resident_pages: 77,
        };
        assert_eq!(Stat::of(line), Some(wanted));
        for broken in ["", "1 (a", "1 (a) S 1 2 3", &line.replace("77", "many")] {
            assert_eq!(Stat::of(broken), None, "{broken}");
        }
    }
}
