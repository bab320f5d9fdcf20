//! The `oncegate` program.

fn main() -> std::process::ExitCode {
    oncegate::cli::main()
}
