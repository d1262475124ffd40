//! A world in network namespaces of its own: a host, an internet with servers, and sandboxes.
//!
//! ```text
//!  sandboxes ── (the network under test) ── host 192.0.2.1 ── internet 203.0.113.0/24, 198.51.100.0/24
//! ```
//!
//! Everything is a namespace without a name, so that nothing is left whatever happens.

#![allow(dead_code, clippy::unwrap_used)] // Each suite uses a part of it.

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use netpolicy::{Denial, DenialLog, Member, Network, NetworkConfig, Policy};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sys::netlink::{CableEnd, Routes};
use sys::process::{self, Namespaces};

/// Where the host's resolver is.
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 53);
/// A server of the internet.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
/// Another one.
pub const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 10);
/// The host's own address towards the internet.
pub const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A namespace.
pub struct Place(OwnedFd);

impl Place {
    /// A new one, with loopback.
    pub fn new() -> Self {
        let made = std::thread::spawn(|| {
            process::unshare(Namespaces::NET).unwrap();
            process::loopback_up().unwrap();
            Self::here()
        });
        made.join().unwrap()
    }

    /// That of the calling thread.
    pub fn here() -> Self {
        Self(std::fs::File::open("/proc/thread-self/ns/net").unwrap().into())
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Runs this on a thread inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                process::enter_namespace(self.0.as_fd()).unwrap();
                work()
            });
            thread.join().unwrap()
        })
    }

    /// Leaves this running inside until the test process ends.
    pub fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        let namespace = self.0.try_clone().unwrap();
        std::thread::spawn(move || {
            process::enter_namespace(namespace.as_fd()).unwrap();
            work();
        });
    }
}

/// Runs a test on a host of its own, on a tokio runtime.
pub fn on_a_host(test: impl FnOnce(World) + Send + 'static) {
    let ran = std::thread::spawn(|| {
        process::unshare(Namespaces::NET).unwrap();
        process::loopback_up().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let _entered = runtime.enter();
        test(World::new());
    });
    if let Err(panic) = ran.join() {
        std::panic::resume_unwind(panic);
    }
}

/// The questions that reached the host's resolver.
pub type Questions = Arc<Mutex<Vec<(String, RecordType)>>>;

/// The host, with its internet.
pub struct World {
    pub internet: Place,
    pub questions: Questions,
    pub names: Arc<Mutex<Vec<(String, Ipv4Addr, u32)>>>,
}

impl World {
    fn new() -> Self {
        let internet = Place::new();
        let routes = Routes::open().unwrap();
        let (here, there) = ([2, 0, 0, 0, 0, 8], [2, 0, 0, 0, 0, 9]);
        routes
            .add_cable(
                CableEnd { name: "up", mac: here },
                CableEnd { name: "down", mac: there },
                internet.0.as_fd(),
            )
            .unwrap();
        let up = routes.index_of("up").unwrap();
        routes.set_up(up).unwrap();
        routes.add_address(up, HOST).unwrap();
        let router = Ipv4Addr::new(192, 0, 2, 2);
        routes.add_link_route(router, up, 254).unwrap();
        internet.run(|| {
            let routes = Routes::open().unwrap();
            let down = routes.index_of("down").unwrap();
            routes.set_up(down).unwrap();
            for address in [router, RESOLVER, SERVER, OTHER] {
                routes.add_address(down, address).unwrap();
            }
            routes.add_link_route(HOST, down, 254).unwrap();
        });
        routes.add_default_route(router, up).unwrap();
        let questions = Questions::default();
        let names: Arc<Mutex<Vec<(String, Ipv4Addr, u32)>>> = Arc::default();
        let (heard, known) = (Arc::clone(&questions), Arc::clone(&names));
        internet.spawn(move || resolve(&heard, &known));
        Self { internet, questions, names }
    }

    /// The host's resolver knows this name from now on.
    pub fn name(&self, name: &str, address: Ipv4Addr, ttl: u32) {
        self.names.lock().unwrap().push((format!("{name}."), address, ttl));
    }

    /// Which names were asked for at the host's resolver.
    pub fn asked(&self) -> Vec<String> {
        self.questions.lock().unwrap().iter().map(|(name, _)| name.clone()).collect()
    }

    /// A server that answers each line with the same line.
    pub fn echo(&self, address: Ipv4Addr, port: u16) {
        let listener = self.internet.run(|| TcpListener::bind((address, port)).unwrap());
        serve_echo(listener);
    }

    /// A server that sends datagrams back.
    pub fn echo_datagrams(&self, address: Ipv4Addr, port: u16) {
        let socket = self.internet.run(|| UdpSocket::bind((address, port)).unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _gone = socket.send_to(&buffer[..length], from);
            }
        });
    }

    /// The network under test.
    pub fn network(&self) -> Network {
        self.network_with(NetworkConfig::default())
    }

    pub fn network_with(&self, config: NetworkConfig) -> Network {
        let resolvers = vec![SocketAddr::from((RESOLVER, 53))];
        Network::open(NetworkConfig { resolvers, ..config }).unwrap()
    }
}

/// Answers each line with the same line.
pub fn serve_echo(listener: TcpListener) {
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn resolve(heard: &Questions, known: &Mutex<Vec<(String, Ipv4Addr, u32)>>) {
    let socket = UdpSocket::bind((RESOLVER, 53)).unwrap();
    let mut buffer = [0; 4096];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        let Ok(question) = Message::from_vec(&buffer[..length]) else { continue };
        let query = question.queries[0].clone();
        heard.lock().unwrap().push((query.name().to_ascii(), query.query_type()));
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.add_query(query.clone());
        let known = known.lock().unwrap();
        let mut found = false;
        for (_, address, ttl) in known.iter().filter(|(name, ..)| *name == query.name().to_ascii())
        {
            found = true;
            let data = RData::A(A(*address));
            answer.add_answer(Record::from_rdata(query.name().clone(), *ttl, data));
        }
        if !found {
            answer.metadata.response_code = ResponseCode::NXDomain;
        }
        let _gone = socket.send_to(&answer.to_vec().unwrap(), from);
    }
}

/// A sandbox: a namespace that knows nothing but what the network gives it.
pub struct Sandbox {
    pub place: Place,
    pub member: Arc<Member>,
    pub log: Arc<DenialLog>,
}

impl Sandbox {
    pub fn new(network: &Network, policy: &[&str]) -> Self {
        let (place, log) = (Place::new(), Arc::new(DenialLog::default()));
        let policy = Policy::parse(policy).unwrap();
        let member = network.attach("test", None, place.fd(), policy, Arc::clone(&log)).unwrap();
        Self { place, member, log }
    }

    /// Connects from inside. The time-out only keeps a defect from hanging the test.
    pub fn connect(&self, address: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
        self.place.run(|| {
            let to = SocketAddr::from((address, port));
            let stream = TcpStream::connect_timeout(&to, Duration::from_secs(20))?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            Ok(stream)
        })
    }

    /// Asks the resolver; the answer's code and addresses.
    pub fn ask(&self, name: &str, kind: RecordType) -> (ResponseCode, Vec<Ipv4Addr>) {
        self.place.run(|| {
            let mut question = Message::query();
            let name = hickory_proto::rr::Name::from_ascii(name).unwrap();
            question.add_query(hickory_proto::op::Query::query(name, kind));
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            socket.send_to(&question.to_vec().unwrap(), (netpolicy::GATEWAY, 53)).unwrap();
            let mut buffer = [0; 4096];
            let length = socket.recv(&mut buffer).unwrap();
            let answer = Message::from_vec(&buffer[..length]).unwrap();
            let addresses = answer.answers.iter().filter_map(|record| match &record.data {
                RData::A(address) => Some(address.0),
                _ => None,
            });
            (answer.metadata.response_code, addresses.collect())
        })
    }

    /// Waits until a denial like this was written down.
    pub fn denied(&self, like: impl Fn(&Denial) -> bool) -> Denial {
        for _ in 0..2000 {
            if let Some(denial) = self.log.after(0).into_iter().find(&like) {
                return denial;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no such denial in {:?}", self.log.after(0));
    }
}

/// Sends a line and expects it back.
pub fn echo(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"hello\n")?;
    let mut buffer = [0; 6];
    stream.read_exact(&mut buffer)?;
    assert_eq!(&buffer, b"hello\n");
    Ok(())
}
