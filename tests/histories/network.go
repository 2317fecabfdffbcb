package histories

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// Every node has a network namespace of its own, at a bridge in the namespace of the tests, which is nobody else's either:
//
//	tests ── bridge 10.213.0.254 ─┬─ node 0 of cluster 7: 10.213.7.1
//	                              ├─ node 1 of cluster 7: 10.213.7.2
//	                              └─ …
//
// A namespace lasts as long as a process is in it, so nothing is left however the tests end. What goes from one node to another
// is lost without a word when the sender believes in a hardware address that nobody has.
const (
	bridge  = "nodes"
	gateway = "10.213.0.254"
	nobodys = "02:00:00:00:00:99"
	// leftSaid names the namespace that the tests have left.
	leftSaid = "SETTEE_HISTORIES_LEFT"
)

// withoutNetwork says why nodes cannot have namespaces here; empty if they can.
var withoutNetwork = "the tests were not started in a namespace of their own"

func again() (int, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), leftSaid+"="+namespace())
	cmd.SysProcAttr = inNamespace()
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode(), nil
}

func inNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
}

// namespace names the one this process is in.
func namespace() string {
	name, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err.Error()
	}
	return name
}

// layCables makes the bridge, in no namespace that is somebody else's.
func layCables() error {
	if os.Getenv(leftSaid) == namespace() {
		return fmt.Errorf("%s is not the tests' own", namespace())
	}
	return ip(
		"link set lo up",
		"link add name "+bridge+" type bridge",
		"addr add "+gateway+"/16 dev "+bridge,
		"link set "+bridge+" up",
	)
}

func ip(lines ...string) error {
	for _, line := range lines {
		if said, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", line, err, said)
		}
	}
	return nil
}

// place is where a node runs.
type place struct {
	cluster, number int
	// holder keeps the namespace while the node is down; nil: the node runs where the tests do.
	holder *exec.Cmd
}

// newPlace makes room for a node, in a namespace of its own if there can be one.
func newPlace(cluster, number int) (*place, error) {
	p := &place{cluster: cluster, number: number}
	if withoutNetwork != "" {
		return p, nil
	}
	p.holder = exec.Command("sleep", "infinity")
	p.holder.SysProcAttr = inNamespace()
	if err := p.holder.Start(); err != nil {
		return nil, err
	}
	err := ip(fmt.Sprintf("link add %s type veth peer name inside netns %d", p.cable(), p.holder.Process.Pid),
		"link set "+p.cable()+" master "+bridge+" up")
	if err == nil {
		err = p.ip("link set lo up", fmt.Sprintf("addr add %s/16 dev inside", p.host()), "link set inside up")
	}
	return p, err
}

func (p *place) host() string {
	if p.holder == nil {
		return "127.0.0.1"
	}
	return fmt.Sprintf("10.213.%d.%d", p.cluster, p.number+1)
}

// cable names the end of the node's cable that is at the bridge.
func (p *place) cable() string {
	return fmt.Sprintf("node%d-%d", p.cluster, p.number)
}

// command is a program that will run there.
func (p *place) command(program string, args ...string) *exec.Cmd {
	if p.holder != nil {
		enter := []string{"-t", fmt.Sprint(p.holder.Process.Pid), "-n", "--", program}
		program, args = "nsenter", append(enter, args...)
	}
	cmd := exec.Command(program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (p *place) ip(lines ...string) error {
	for _, line := range lines {
		if said, err := p.command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s at node %d: %w: %s", line, p.number, err, said)
		}
	}
	return nil
}

// mute loses what goes from here to another node.
func (p *place) mute(to *place) error {
	return p.ip(fmt.Sprintf("neigh replace %s lladdr %s dev inside nud permanent", to.host(), nobodys))
}

func (p *place) unmute(to *place) error {
	return p.ip(fmt.Sprintf("neigh del %s dev inside", to.host()))
}

func (p *place) leave() {
	if p.holder != nil {
		_ = ip("link del " + p.cable())
		_ = p.holder.Process.Kill()
		_ = p.holder.Wait()
	}
}
