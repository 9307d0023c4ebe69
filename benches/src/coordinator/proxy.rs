//! The proxies that are measured, each in a process of its own: the coordinator, by this program once more, and nginx.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crab_coordinator::{Listen, resolve::one_sandbox};
use crab_core::{TurnBoundary, Verdict, VersionId};

/// Set for the process that is the coordinator: the model's address.
const MODEL: &str = "CRAB_BENCH_MODEL";
/// And where its journal is, if it has one.
const JOURNAL: &str = "CRAB_BENCH_JOURNAL";

/// Ends with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory of the bench, emptied.
pub(super) fn scratch(name: &str) -> Result<PathBuf, String> {
    let dir = std::env::temp_dir().join(format!("crab-bench-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    Ok(dir)
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The coordinator with one sandbox and gates that open at once.
pub(super) struct Coordinator {
    pub(super) address: SocketAddr,
    process: Process,
    _journal: Option<Scratch>,
}

impl Coordinator {
    pub(super) fn start(model: SocketAddr, journal: Option<&Path>) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot start the coordinator: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("coordinator").env(MODEL, model.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(journal) = journal {
            command.env(JOURNAL, journal);
        }
        let mut process = Process(command.spawn().map_err(failed)?);
        let mut line = String::new();
        if let Some(stdout) = process.0.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
        }
        let address = line.trim().parse().map_err(|_| "the coordinator did not say where it listens".to_owned())?;
        Ok(Self { address, process, _journal: journal.map(|dir| Scratch(dir.to_owned())) })
    }

    /// Lets the peak of its resident memory begin anew, and says how much is resident, in KiB.
    pub(super) fn reset_peak(&self) -> std::io::Result<u64> {
        std::fs::write(format!("/proc/{}/clear_refs", self.process.0.id()), "5")?;
        self.status("VmRSS:")
    }

    /// The most that was resident since, in KiB.
    pub(super) fn peak(&self) -> std::io::Result<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> std::io::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.0.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok())
            .ok_or_else(|| std::io::Error::other(format!("no {field}")))
    }
}

/// Whether this process is to be the coordinator.
pub(super) fn is_child() -> bool {
    std::env::var_os(MODEL).is_some()
}

/// Is the coordinator until its input ends, that is, until the bench does.
pub(super) fn serve() -> Result<(), String> {
    let model = std::env::var(MODEL).map_err(|error| error.to_string())?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
    let mut builder = crab_coordinator::Coordinator::builder()
        .upstream(format!("http://{model}"))
        .listen(Listen::loopback(), one_sandbox("box").map_err(|error| error.to_string())?);
    if let Some(journal) = std::env::var_os(JOURNAL) {
        builder = builder.journal(journal);
    }
    let (coordinator, mut boundaries) = runtime.block_on(builder.start()).map_err(|error| error.to_string())?;
    runtime.spawn(async move {
        while let Some(boundary) = boundaries.next().await {
            boundary.gate.decide(Verdict::Durable(VersionId(1)));
        }
    });
    println!("{}", coordinator.address().ok_or("no address")?);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    runtime.block_on(std::future::pending())
}

/// nginx as a plain reverse proxy, with one worker and connections that are kept.
pub(super) struct Nginx {
    pub(super) address: SocketAddr,
    _process: Process,
    _dir: Scratch,
}

impl Nginx {
    pub(super) fn start(model: SocketAddr) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot start nginx: {error}");
        let nginx = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"]
            .into_iter()
            .find(|path| Path::new(path).exists())
            .ok_or("nginx is not installed, and is what the coordinator is compared with: apt-get install nginx-light (this bench starts its own, on its own configuration)")?;
        let dir = Scratch(scratch("nginx")?);
        // It cannot say which port it was given, so it is told one that was free a moment ago.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(failed)?;
        let config = dir.0.join("nginx.conf");
        std::fs::write(&config, configuration(&dir.0, model, free)).map_err(failed)?;
        let process = Command::new(nginx)
            .arg("-c")
            .arg(&config)
            .arg("-e")
            .arg(dir.0.join("error.log"))
            .stdin(Stdio::null())
            .spawn()
            .map(Process)
            .map_err(failed)?;
        let begun = Instant::now();
        while TcpStream::connect(free).is_err() {
            if begun.elapsed() > Duration::from_secs(10) {
                return Err(format!(
                    "nginx does not listen: {}",
                    std::fs::read_to_string(dir.0.join("error.log")).unwrap_or_default()
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { address: free, _process: process, _dir: dir })
    }
}

/// Modules that Debian's packages load by default are not loaded; one process, so that it ends when it is killed.
fn configuration(dir: &Path, model: SocketAddr, listen: SocketAddr) -> String {
    let dir = dir.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("    {kind}_temp_path {dir}/{kind};\n"))
        .concat();
    format!(
        "daemon off;
master_process off;
pid {dir}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000;
{temporary}
    upstream model {{
        server {model};
        keepalive 16;
        keepalive_requests 1000000;
    }}
    server {{
        listen {listen};
        location / {{
            proxy_pass http://model;
            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
        }}
    }}
}}
"
    )
}
