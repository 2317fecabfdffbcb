//! A server as its users have it: the real binary, real sockets, a real directory.
//!
//! Nothing here sleeps. A test waits for a line the server prints, for its end, or for an answer; each wait has a bound
//! that only a hanging server meets.

// Every test binary compiles this module and uses its own part of it.
#![allow(dead_code, unused_imports)]

pub mod connection;
pub mod dice;
pub mod nodes;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

pub use connection::{Connection, Reply};
pub use dice::Dice;

pub const USER: &str = "Administrator";
pub const PASSWORD: &str = "seventeen herons";

/// Longest wait for anything the server should do by itself.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A directory on the disk the build is on, so that a sync means something even where /tmp is memory.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the build directory is writable")
}

/// The binary, away from any server of the machine and from the caller's environment.
pub fn settee() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_settee"));
    command.env_remove("SETTEE_PASSWORD").current_dir(env!("CARGO_TARGET_TMPDIR")).stdin(Stdio::null());
    command
}

/// Runs a subcommand to its end.
pub fn run(arguments: &[&str]) -> Ended {
    Ended::of(settee().env("SETTEE_PASSWORD", PASSWORD).args(arguments).output().expect("the binary starts"))
}

/// How a process ended and what it said.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    fn of(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// It ended with this code and its last words hold every one of `words`.
    #[track_caller]
    pub fn said(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "exit code; signal {:?}; stderr:\n{}", self.signal, self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in what it said:\n{}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "a panic is no message:\n{}", self.stderr);
    }

    #[track_caller]
    pub fn fine(&self) -> &str {
        assert_eq!(self.code, Some(0), "signal {:?}; stderr:\n{}", self.signal, self.stderr);
        &self.stdout
    }
}

/// `settee serve`, about to be started.
pub struct Serve(Command);

impl Serve {
    /// On free ports, with [`PASSWORD`].
    pub fn on(data_dir: &Path) -> Serve {
        Serve::bare().arg("--data-dir").arg(data_dir).arg("--kv=127.0.0.1:0").arg("--admin=127.0.0.1:0")
    }

    /// `settee cluster-run` in this directory, with [`PASSWORD`].
    pub fn cluster(dir: &Path) -> Serve {
        let mut command = settee();
        command.arg("cluster-run").env("SETTEE_PASSWORD", PASSWORD).arg("--data-dir").arg(dir);
        // Many log in, and what that costs is not what these tests are about.
        command.arg("--set=auth.scram_iterations=4096");
        Serve(command)
    }

    /// With no option at all.
    pub fn bare() -> Serve {
        let mut command = settee();
        command.arg("serve").env("SETTEE_PASSWORD", PASSWORD);
        Serve(command)
    }

    pub fn arg(mut self, argument: impl AsRef<std::ffi::OsStr>) -> Serve {
        self.0.arg(argument);
        self
    }

    pub fn set(self, pair: &str) -> Serve {
        self.arg("--set").arg(pair)
    }

    pub fn env(mut self, name: &str, value: &str) -> Serve {
        self.0.env(name, value);
        self
    }

    /// With no more than so many open files.
    pub fn descriptors(self, limit: u64) -> Serve {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit} && exec \"$0\" \"$@\"")]);
        command.arg(self.0.get_program()).args(self.0.get_args()).stdin(Stdio::null());
        if let Some(dir) = self.0.get_current_dir() {
            command.current_dir(dir);
        }
        for (name, value) in self.0.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Serve(command)
    }

    /// Nobody chose a password.
    pub fn without_password(mut self) -> Serve {
        self.0.env_remove("SETTEE_PASSWORD");
        self
    }

    /// Starts the process and does not wait.
    pub fn spawn(mut self) -> Server {
        let began = Instant::now();
        let mut child = self.0.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let (lines, output) = mpsc::channel();
        listen(child.stdout.take().expect("piped"), lines.clone(), Line::Out);
        listen(child.stderr.take().expect("piped"), lines, Line::Err);
        let (kv, admin) = (String::new(), String::new());
        Server { child, output, stdout: String::new(), stderr: String::new(), kv, admin, began, ready_after: None }
    }

    /// Starts the process and waits until it accepts clients.
    #[track_caller]
    pub fn start(self) -> Server {
        let mut server = self.spawn();
        if !server.wait_until_ready() {
            let ended = server.ended();
            panic!("the server ended with {:?}, signal {:?}:\n{}", ended.code, ended.signal, ended.stderr);
        }
        server
    }

    /// Starts what must end by itself without ever accepting a client.
    #[track_caller]
    pub fn refused(self) -> Ended {
        let ended = self.spawn().ended();
        assert!(!ended.stdout.contains("ready "), "it was ready:\n{}", ended.stderr);
        ended
    }
}

enum Line {
    Out(String),
    Err(String),
}

fn listen(pipe: impl Read + Send + 'static, lines: Sender<Line>, which: fn(String) -> Line) {
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while pipe.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            if lines.send(which(String::from_utf8_lossy(&bytes).into_owned())).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}

/// A running server. Dropped, it is killed.
pub struct Server {
    child: Child,
    output: Receiver<Line>,
    stdout: String,
    pub stderr: String,
    pub kv: String,
    pub admin: String,
    began: Instant,
    pub ready_after: Option<Duration>,
}

impl Server {
    /// Whether it got there; if not, it has ended.
    pub fn wait_until_ready(&mut self) -> bool {
        while self.ready_after.is_none() {
            if !self.next_line() {
                return false;
            }
        }
        true
    }

    /// Waits until the log has this many lines, or it is ready, or it has ended.
    pub fn wait_for_log_lines(&mut self, lines: usize) {
        while self.ready_after.is_none() && self.stderr.lines().count() < lines && self.next_line() {}
    }

    /// Waits until a line of the log holds `word`; `false`: it ended before.
    pub fn wait_for_log(&mut self, word: &str) -> bool {
        while !self.stderr.contains(word) {
            if !self.next_line() {
                return false;
            }
        }
        true
    }

    /// The same of what it prints.
    pub fn wait_for_output(&mut self, word: &str) -> bool {
        while !self.stdout.contains(word) {
            if !self.next_line() {
                return false;
            }
        }
        true
    }

    /// SIGKILL.
    pub fn kill9(mut self) -> Ended {
        self.child.kill().expect("our own child");
        self.ended()
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    pub fn signal(&self, name: &str) {
        // The shell's own `kill`: the program is not on every machine.
        let status = Command::new("sh").args(["-c", "kill -s \"$1\" \"$2\"", "sh", name]).arg(self.pid()).status();
        assert!(status.expect("sh starts").success(), "no SIG{name} for {}", self.pid());
    }

    /// The most files it may have open from now on, soft limit and hard.
    pub fn limit_descriptors(&self, limits: &str) {
        let status = Command::new("prlimit").arg(format!("--nofile={limits}")).args(["--pid", &self.pid()]).status();
        assert!(status.expect("prlimit, of util-linux, starts").success());
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// What it has printed so far.
    pub fn said(&self) -> &str {
        &self.stdout
    }

    /// An orderly stop.
    #[track_caller]
    pub fn stop(self) -> Ended {
        self.terminate();
        let ended = self.ended();
        ended.fine();
        ended
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(mut self) -> Ended {
        while self.next_line() {}
        let status = self.child.wait().expect("our own child");
        Ended {
            code: status.code(),
            signal: status.signal(),
            stdout: std::mem::take(&mut self.stdout),
            stderr: std::mem::take(&mut self.stderr),
        }
    }

    /// A client that has logged in and uses this bucket.
    #[track_caller]
    pub fn client(&self, bucket: &str) -> Connection {
        Connection::log_in(&self.kv, bucket, connection::FEATURES).expect("a client may log in")
    }

    /// Runs a subcommand against this server.
    pub fn tool(&self, arguments: &[&str]) -> Ended {
        run(&[arguments, &["--kv", &self.kv]].concat())
    }

    /// The status line and body of a GET on the admin port.
    pub fn http(&self, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.admin).expect("the admin port answers");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time above zero");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: settee\r\nConnection: close\r\n\r\n").expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers in text");
        let (head, body) = text.split_once("\r\n\r\n").expect("an answer has a head");
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    /// Takes in one line; `false`: both pipes are closed, so the process is gone.
    fn next_line(&mut self) -> bool {
        match self.output.recv_timeout(PATIENCE) {
            Ok(Line::Out(line)) => {
                if let Some(found) = line.strip_prefix("ready ") {
                    let value =
                        |name| found.split_whitespace().find_map(|word| word.strip_prefix(name)).map(str::to_owned);
                    self.kv = value("kv=").expect("the ready line tells the key-value address");
                    self.admin = value("admin=").expect("the ready line tells the admin address");
                    self.ready_after = Some(self.began.elapsed());
                }
                self.stdout.push_str(&line);
                true
            }
            Ok(Line::Err(line)) => {
                self.stderr.push_str(&line);
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                panic!("the server said and did nothing for {PATIENCE:?}:\n{}{}", self.stdout, self.stderr);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            while let Ok(line) = self.output.recv_timeout(PATIENCE) {
                match line {
                    Line::Out(line) => self.stdout.push_str(&line),
                    Line::Err(line) => self.stderr.push_str(&line),
                }
            }
            eprintln!("the server's last words:\n{}", self.stderr);
        }
    }
}

/// The vBucket files of a bucket, by name.
pub fn vbucket_files(data_dir: &Path, bucket: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data_dir.join("buckets").join(bucket)).expect("the bucket has a directory");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    files.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rev = name.split_once(".couch.").map(|(_, rev)| rev);
        rev.is_some_and(|rev| rev.bytes().all(|b| b.is_ascii_digit()))
    });
    files.sort();
    files
}
